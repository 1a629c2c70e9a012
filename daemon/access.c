/* SPDX-License-Identifier: Apache-2.0 */
/* The access list: a file of lines to rules, and what they give to whom. */
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <grp.h>
#include <limits.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "daemon/access.h"
#include "include/internal/cleanup.h"
#include "include/internal/error.h"
#include "include/kvcached/types.h"

#define LINE_BYTES 4096
#define SPACE	   " \t\n"
#define MOST_RULES 65536u

enum subject { ANYBODY, USER, GROUP };

/* One right of one subject. */
struct rule {
	uint32_t rights;
	enum subject subject;
	uint32_t id;
	char pool[KV_NAME_MAX]; /* pattern; "": the daemon */
};

struct kv_access {
	char *path;
	struct rule *rules;
	uint32_t n_rules;
	struct stat seen; /* the file that was read, or refused, last */
};

static void fclosep(FILE **f)
{
	if (*f)
		fclose(*f);
}

struct kv_access *kv_access_free(struct kv_access *a)
{
	if (!a)
		return NULL;
	free(a->path);
	free(a->rules);
	free(a);
	return NULL;
}

const char *kv_access_path(const struct kv_access *a)
{
	return a->path;
}

static int parse_right(const char *word, uint32_t *ret)
{
	static const struct {
		const char *name;
		uint32_t rights;
	} rights[] = {{"open", KV_RIGHT_OPEN | KV_RIGHT_READ},
		      {"read", KV_RIGHT_READ},
		      {"admin", KV_RIGHT_ADMIN}};

	for (size_t i = 0; i < sizeof(rights) / sizeof(rights[0]); i++) {
		if (!strcmp(word, rights[i].name)) {
			*ret = rights[i].rights;
			return 0;
		}
	}
	return kv_error(-EINVAL, "right: '%s' given; open, read or admin is needed", word);
}

static bool is_number(const char *word, uint32_t *ret)
{
	unsigned long n;
	char *end;

	if (*word < '0' || *word > '9')
		return false;
	errno = 0;
	n = strtoul(word, &end, 10);
	if (*end || errno || n >= UINT32_MAX)
		return false;
	*ret = (uint32_t)n;
	return true;
}

static int parse_subject(const char *word, struct rule *rule)
{
	const struct passwd *user;
	const struct group *group;

	if (!strcmp(word, "*")) {
		rule->subject = ANYBODY;
		return 0;
	}
	rule->subject = *word == '@' ? GROUP : USER;
	if (is_number(word + (*word == '@'), &rule->id))
		return 0;
	if (rule->subject == GROUP) {
		group = getgrnam(word + 1);
		if (!group)
			return kv_error(-EINVAL, "group: '%s' given; this machine has no group of that "
					"name: @NAME or @NUMBER is needed", word);
		rule->id = group->gr_gid;
		return 0;
	}
	user = getpwnam(word);
	if (!user)
		return kv_error(-EINVAL, "user: '%s' given; this machine has no user of that name: a "
				"name, a number, @GROUP or * is needed", word);
	rule->id = user->pw_uid;
	return 0;
}

static int add(struct kv_access *a, const struct rule *rule)
{
	struct rule *more;

	if (a->n_rules == MOST_RULES)
		return kv_error(-EINVAL, "more than %u rights", MOST_RULES);
	if (!(a->n_rules & (a->n_rules - 1))) {
		more = realloc(a->rules, (a->n_rules ? 2 * a->n_rules : 1) * sizeof(*more));
		if (!more)
			return kv_error(-ENOMEM, "no memory for the access list");
		a->rules = more;
	}
	a->rules[a->n_rules++] = *rule;
	return 0;
}

static int parse_line(struct kv_access *a, char *line)
{
	char *rest, *word;
	struct rule rule = {0};
	uint32_t n = 0;
	int r;

	line[strcspn(line, "#")] = 0;
	word = strtok_r(line, SPACE, &rest);
	if (!word)
		return 0;
	r = parse_right(word, &rule.rights);
	if (r < 0)
		return r;
	word = strtok_r(NULL, SPACE, &rest);
	if (!word)
		return kv_error(-EINVAL, "pool: none given; a pattern like llama-*, or - for the daemon, is "
				"needed");
	if (strlen(word) >= KV_NAME_MAX)
		return kv_error(-EINVAL, "pool: '%s' has %zu bytes, names have at most %d", word,
				strlen(word), KV_NAME_MAX - 1);
	if (strcmp(word, "-"))
		strcpy(rule.pool, word);
	else if (rule.rights != KV_RIGHT_ADMIN)
		return kv_error(-EINVAL, "pool: '-' given; of the daemon itself there is only admin");
	while ((word = strtok_r(NULL, SPACE, &rest))) {
		r = parse_subject(word, &rule);
		if (!r)
			r = add(a, &rule);
		if (r < 0)
			return r;
		n++;
	}
	return n ? 0 : kv_error(-EINVAL, "user: none given; users, @groups or * are needed");
}

static int read_lines(struct kv_access *a, FILE *f)
{
	char line[LINE_BYTES], text[KV_ERROR_BYTES];
	int r = 0;

	for (uint32_t n = 1; !r && fgets(line, sizeof(line), f); n++) {
		if (!strchr(line, '\n') && !feof(f))
			r = kv_error(-EINVAL, "line: longer than %d bytes", LINE_BYTES - 2);
		else
			r = parse_line(a, line);
		if (r < 0) {
			snprintf(text, sizeof(text), "%s", kv_error_text());
			return kv_error(r, "%.120s:%u: %s", a->path, n, text);
		}
	}
	return ferror(f) ? kv_error(-EIO, "%s: it can't be read", a->path) : 0;
}

/* Whoever can write the file can give itself all. */
static int check_file(const char *path, const struct stat *st)
{
	if (!S_ISREG(st->st_mode))
		return kv_error(-EINVAL, "--access: '%s' is no ordinary file", path);
	if (st->st_mode & S_IWOTH)
		return kv_error(-EINVAL, "--access: '%s' has mode %03o, everybody may write it: chmod o-w",
				path, st->st_mode & 0777);
	return 0;
}

static int read_file(struct kv_access *a)
{
	kv_cleanup(fclosep) FILE *f = NULL;
	int fd = open(a->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	int r;

	if (fd < 0)
		return kv_error(-errno, "--access: '%s': %s", a->path, strerror(errno));
	r = fstat(fd, &a->seen) < 0 ? -errno : check_file(a->path, &a->seen);
	f = r < 0 ? NULL : fdopen(fd, "r");
	if (!f) {
		kv_close(fd);
		return r < 0 ? r : kv_error(-ENOMEM, "no memory for the access list");
	}
	return read_lines(a, f);
}

int kv_access_new_empty(const char *path, struct kv_access **ret)
{
	struct kv_access *a = calloc(1, sizeof(*a));

	if (a)
		a->path = realpath(path, NULL);
	if (a && !a->path)
		a->path = strdup(path);
	if (!a || !a->path) {
		kv_access_free(a);
		return kv_error(-ENOMEM, "no memory for the access list");
	}
	*ret = a;
	return 0;
}

int kv_access_new(const char *path, struct kv_access **ret)
{
	struct kv_access *a;
	int r = kv_access_new_empty(path, &a);

	if (r < 0)
		return r;
	r = read_file(a);
	if (r < 0) {
		kv_access_free(a);
		return r;
	}
	*ret = a;
	return 0;
}

static bool is_same(const struct stat *a, const struct stat *b)
{
	return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size &&
	       a->st_mode == b->st_mode && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
	       a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

int kv_access_refresh(struct kv_access *a)
{
	struct kv_access *fresh;
	struct stat st;
	int r;

	if (stat(a->path, &st) < 0)
		memset(&st, 0, sizeof(st)); /* it is gone: said once, as any other mistake */
	if (is_same(&st, &a->seen))
		return 0;
	a->seen = st;
	r = kv_access_new(a->path, &fresh);
	if (r < 0)
		return r;
	free(a->rules);
	a->rules = kv_steal(fresh->rules);
	a->n_rules = fresh->n_rules;
	a->seen = fresh->seen;
	kv_access_free(fresh);
	return 0;
}

static bool is_meant(const struct rule *rule, const struct kv_who *who)
{
	if (rule->subject != GROUP)
		return rule->subject == ANYBODY || rule->id == who->uid;
	for (uint32_t i = 0; i < who->n_groups; i++) {
		if (who->groups[i] == rule->id)
			return true;
	}
	return false;
}

uint32_t kv_access_rights(const struct kv_access *a, const struct kv_who *who, const char *pool)
{
	uint32_t rights = 0;

	for (uint32_t i = 0; i < a->n_rules; i++) {
		const struct rule *rule = &a->rules[i];

		if (pool ? rule->pool[0] && !fnmatch(rule->pool, pool, 0) : !rule->pool[0])
			rights |= is_meant(rule, who) ? rule->rights : 0;
	}
	return rights;
}

int kv_peer_groups(int fd, gid_t gid, gid_t **ret, uint32_t *ret_n)
{
	socklen_t size = NGROUPS_MAX * sizeof(gid_t);
	kv_cleanup(kv_freep) gid_t *groups = malloc(size + sizeof(gid_t));

	if (!groups)
		return -ENOMEM;
	groups[0] = gid;
	if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups + 1, &size) < 0)
		size = 0; /* kernels before 4.13: the group of its credentials alone */
	*ret_n = 1 + size / (socklen_t)sizeof(gid_t);
	*ret = kv_steal(groups);
	return 0;
}
