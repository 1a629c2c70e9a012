/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines on stderr: what was decided, once. With journald's priority prefix when run by systemd. A line never waits:
 * while nobody reads them they are left out, and counted.
 */
#ifndef KV_DAEMON_LOG_H
#define KV_DAEMON_LOG_H

enum kv_log_level {
	KV_LOG_ERROR = 3,
	KV_LOG_WARN = 4,
	KV_LOG_INFO = 6,
	KV_LOG_DEBUG = 7,
};

void kv_log_set_level(int level);
int kv_log_level_parse(const char *text); /* -EINVAL with text */
void kv_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
