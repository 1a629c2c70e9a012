/* SPDX-License-Identifier: Apache-2.0 */
/* Section FIELDS of kvctl(1), from the rows of libclient/stats_fields.c. Runs while building. */
#include <stdio.h>

#include <kvcached/stats.h>

int main(void)
{
	static const struct {
		enum kv_stat_kind kind;
		const char *title;
	} tables[] = {
		{KV_STAT_DAEMON, "The daemon (member _daemon_ of *stats*)"},
		{KV_STAT_GPU, "A device (_gpus_ of *stats*)"},
		{KV_STAT_POOL, "A pool (_pools_ of *stats*, *pool list*, *pool show*)"},
		{KV_STAT_SESSION,
		 "A session (_sessions_ of *stats* and *pool show*, *session list*, "
		 "*session show*)"},
		{KV_STAT_BALANCE, "A pool's books (_pools_ of *check*)"},
		{KV_STAT_ERROR, "What is wrong (_errors_ of *check*)"},
		{KV_STAT_HISTORY, "A pool at one moment of the last hours (_samples_ of *report*)"},
		{KV_STAT_BLOCK, "A block (*block show*)"},
	};

	for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++) {
		printf("%s:\n\n", tables[i].title);
		for (const struct kv_stat_field *f = kv_stat_fields(tables[i].kind); f->name; f++)
			printf("|[ %s\n:[ %s\n:< %s\n", f->name, f->unit, f->help);
		printf("\n");
	}
	return ferror(stdout) || fflush(stdout);
}
