/* SPDX-License-Identifier: Apache-2.0 */
/* daemon/loop.c: timers and tasks, and what they cost (linked with --wrap of the heap). */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/daemon/loop_case.h"

/* Timers and tasks: each call notes a number. */

static int notes[4096];
static int n_notes;

struct noter {
	struct kv_timer *timer;
	struct kv_task *task;
	int number;
	int64_t again_ns;    /* > 0: the timer sets itself again */
	int n_queues;	     /* > 0: the task queues itself again */
	struct noter *frees; /* may be itself */
};

static void note(void *arg)
{
	struct noter *noter = arg;

	ck_assert_int_lt(n_notes, 4096);
	notes[n_notes++] = noter->number;
	if (noter->again_ns)
		kv_timer_set(noter->timer, noter->again_ns);
	if (noter->n_queues > 0) {
		noter->n_queues--;
		kv_task_queue(noter->task);
	}
	if (noter->frees) {
		noter->frees->timer = kv_timer_free(noter->frees->timer);
		noter->frees->task = kv_task_free(noter->frees->task);
	}
}

static void make_timer(struct noter *noter, int number)
{
	*noter = (struct noter){.number = number};
	ck_assert_int_eq(kv_timer_new(loop, note, noter, &noter->timer), 0);
}

static void make_task(struct noter *noter, int number)
{
	*noter = (struct noter){.number = number};
	ck_assert_int_eq(kv_task_new(loop, note, noter, &noter->task), 0);
}

/* Steps until @n notes are there, or for 10 s. */
static void step_until(int n)
{
	int64_t end_ns = clock_ns() + 10 * KV_SEC;

	while (n_notes < n && clock_ns() < end_ns)
		ck_assert_int_eq(kv_loop_step(loop, KV_SEC), 0);
	ck_assert_int_ge(n_notes, n);
}

START_TEST(timers_are_called_in_order_and_never_early)
{
	static const int delay_ms[] = {30, 10, 20, 10, 0};
	static const int order[] = {4, 1, 3, 2, 0};
	struct noter noters[5];
	int64_t start_ns;
	int i;

	start_ns = clock_ns();
	for (i = 0; i < 5; i++) {
		make_timer(&noters[i], i);
		kv_timer_set(noters[i].timer, delay_ms[i] * KV_MSEC);
	}
	for (i = 0; i < 5; i++) {
		step_until(i + 1);
		ck_assert_int_eq(notes[i], order[i]);
		ck_assert_int_ge(kv_loop_now(loop) - start_ns, delay_ms[order[i]] * KV_MSEC);
	}
	step();
	ck_assert_int_eq(n_notes, 5);
	for (i = 0; i < 5; i++)
		kv_timer_free(noters[i].timer);
}
END_TEST

START_TEST(a_timer_set_again_forgets_the_time_before)
{
	struct noter a, b, never;

	make_timer(&a, 1);
	make_timer(&b, 2);
	make_timer(&never, 3);
	kv_timer_set(a.timer, 0);
	kv_timer_set(never.timer, 0);
	kv_timer_set(b.timer, 5 * KV_MSEC);
	kv_timer_set(a.timer, 10 * KV_MSEC);
	kv_timer_set(never.timer, -1);
	step_until(2);
	ck_assert_int_eq(notes[0], 2);
	ck_assert_int_eq(notes[1], 1);
	kv_timer_set(never.timer, INT64_MAX); /* no overflow into the past */
	step();
	ck_assert_int_eq(n_notes, 2);
	kv_timer_free(a.timer);
	kv_timer_free(b.timer);
	kv_timer_free(never.timer);
}
END_TEST

START_TEST(timers_may_be_freed_in_calls)
{
	struct noter a, b, c;

	make_timer(&a, 1);
	make_timer(&b, 2);
	make_timer(&c, 3);
	a.frees = &b; /* due in the same iteration */
	c.frees = &c;
	kv_timer_set(a.timer, 0);
	kv_timer_set(b.timer, 0);
	kv_timer_set(c.timer, 0);
	step();
	step();
	ck_assert_int_eq(n_notes, 2);
	ck_assert_int_eq(notes[0], 1);
	ck_assert_int_eq(notes[1], 3);
	kv_timer_free(a.timer);
}
END_TEST

START_TEST(a_timer_that_sets_itself_lets_others_run)
{
	struct ear ear = {.fd = make_eventfd(1)};
	struct noter noter;
	int i;

	make_timer(&noter, 1);
	noter.again_ns = 1;
	kv_timer_set(noter.timer, 0);
	ear_watch(&ear, KV_LOOP_IN);
	for (i = 1; i <= 10; i++) {
		step_until(i);
		ck_assert_int_eq(ear.n_calls >= i, 1);
	}
	kv_timer_free(noter.timer);
	ear_close(&ear);
}
END_TEST

START_TEST(a_thousand_random_timers_come_in_the_order_of_their_times)
{
	static struct noter noters[1000];
	static int delay_us[1000];
	int i, k, n = 0;

	srand(11);
	for (i = 0; i < 1000; i++)
		make_timer(&noters[i], i);
	for (k = 0; k < 5000; k++) {
		i = rand() % 1000;
		/* Far enough apart that the time it takes to set them doesn't count. */
		delay_us[i] = rand() % 4 ? 200000 + rand() % 8 * 50000 : -1;
		kv_timer_set(noters[i].timer, delay_us[i] < 0 ? -1 : delay_us[i] * (int64_t)1000);
		if (rand() % 8 == 0) {
			kv_timer_free(noters[i].timer);
			make_timer(&noters[i], i);
			delay_us[i] = -1;
		}
	}
	for (i = 0; i < 1000; i++)
		n += delay_us[i] > 0;
	step_until(n);
	ck_assert_int_eq(n_notes, n);
	for (i = 1; i < n; i++)
		ck_assert_int_le(delay_us[notes[i - 1]], delay_us[notes[i]]);
	for (i = 0; i < 1000; i++)
		kv_timer_free(noters[i].timer);
}
END_TEST

START_TEST(a_task_queued_often_runs_once)
{
	struct noter a, b, freed;
	int64_t start_ns;

	make_task(&a, 1);
	make_task(&b, 2);
	make_task(&freed, 3);
	kv_task_queue(a.task);
	kv_task_queue(freed.task);
	kv_task_queue(b.task);
	kv_task_queue(a.task);
	kv_task_free(freed.task);
	start_ns = clock_ns();
	ck_assert_int_eq(kv_loop_step(loop, 10 * KV_SEC), 0);
	ck_assert_int_lt(clock_ns() - start_ns, 5 * KV_SEC);
	step();
	ck_assert_int_eq(n_notes, 2);
	ck_assert_int_eq(notes[0], 1);
	ck_assert_int_eq(notes[1], 2);
	kv_task_free(a.task);
	kv_task_free(b.task);
}
END_TEST

START_TEST(tasks_may_queue_themselves_and_free_each_other)
{
	struct noter again, a, b;

	make_task(&again, 1);
	make_task(&a, 2);
	make_task(&b, 3);
	again.n_queues = 2;
	a.frees = &b;
	kv_task_queue(again.task);
	kv_task_queue(a.task);
	kv_task_queue(b.task);
	ck_assert_int_eq(kv_loop_step(loop, 10 * KV_SEC), 0);
	ck_assert_int_eq(n_notes, 2);
	ck_assert_int_eq(kv_loop_step(loop, 10 * KV_SEC), 0);
	ck_assert_int_eq(kv_loop_step(loop, 10 * KV_SEC), 0);
	ck_assert_int_eq(n_notes, 4);
	step();
	ck_assert_int_eq(n_notes, 4);
	kv_task_free(again.task);
	kv_task_free(a.task);
}
END_TEST

static void stop_and_queue(uint32_t events, void *arg)
{
	kv_loop_stop(loop);
	kv_task_queue(arg);
}

START_TEST(stopping_finishes_the_iteration)
{
	struct ear a = {.fd = make_eventfd(1)}, b = {.fd = make_eventfd(1)};
	struct noter noter;

	make_task(&noter, 1);
	ck_assert_int_eq(
		kv_loop_watch(loop, a.fd, KV_LOOP_IN, stop_and_queue, noter.task, &a.watch), 0);
	ear_watch(&b, KV_LOOP_IN);
	ck_assert_int_eq(kv_loop_run(loop), 0);
	ck_assert_int_eq(b.n_calls, 1);
	ck_assert_int_eq(n_notes, 1);
	ck_assert_int_eq(kv_loop_run(loop), 0); /* and can be run again */
	ck_assert_int_eq(b.n_calls, 2);
	kv_task_free(noter.task);
	ear_close(&a);
	ear_close(&b);
}
END_TEST

/* Costs */

static int64_t cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	return ts.tv_sec * KV_SEC + ts.tv_nsec;
}

START_TEST(an_idle_loop_takes_no_processor_time)
{
	struct ear ears[100];
	int64_t start_ns, used_ns;
	int i;

	for (i = 0; i < 100; i++) {
		ears[i] = (struct ear){.fd = make_eventfd(0)};
		ear_watch(&ears[i], KV_LOOP_IN);
	}
	step();
	start_ns = clock_ns();
	used_ns = cpu_ns();
	while (clock_ns() - start_ns < 500 * KV_MSEC)
		ck_assert_int_eq(kv_loop_step(loop, 500 * KV_MSEC), 0);
	ck_assert_int_lt(cpu_ns() - used_ns, 10 * KV_MSEC);
	for (i = 0; i < 100; i++)
		ear_close(&ears[i]);
}
END_TEST

/* Counts what the loop asks of the heap (linked with --wrap). */
static long n_allocations;

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *p, size_t size);

void *__wrap_malloc(size_t size)
{
	n_allocations++;
	return __real_malloc(size);
}

void *__wrap_calloc(size_t n, size_t size)
{
	n_allocations++;
	return __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t size)
{
	n_allocations++;
	return __real_realloc(p, size);
}

static void hear_only(uint32_t events, void *arg)
{
	struct noter *noter = arg;

	n_notes++;
	kv_timer_set(noter->timer, n_notes % 3 ? KV_SEC : -1);
	kv_task_queue(noter->task);
}

static void do_nothing(void *arg)
{
}

START_TEST(events_timers_and_tasks_allocate_nothing)
{
	struct kv_watch *watches[50];
	struct noter noter = {0};
	long before;
	int i;

	before = n_allocations;
	ck_assert_int_eq(kv_timer_new(loop, do_nothing, NULL, &noter.timer), 0);
	ck_assert_int_gt(n_allocations, before); /* the count counts */
	ck_assert_int_eq(kv_task_new(loop, do_nothing, NULL, &noter.task), 0);
	for (i = 0; i < 50; i++)
		ck_assert_int_eq(kv_loop_watch(loop, make_eventfd(1), KV_LOOP_IN, hear_only, &noter,
					       &watches[i]),
				 0);
	before = n_allocations;
	for (i = 0; i < 1000; i++)
		kv_loop_step(loop, 0); /* no ck_assert here: it allocates */
	before = n_allocations - before;
	ck_assert_int_eq(n_notes, 50000);
	ck_assert_int_eq(before, 0);
	for (i = 0; i < 50; i++)
		kv_watch_free(watches[i]);
	kv_timer_free(noter.timer);
	kv_task_free(noter.task);
}
END_TEST

int main(int argc, char **argv)
{
	TCase *tcase = tcase_create("kind");

	tcase_add_test(tcase, timers_are_called_in_order_and_never_early);
	tcase_add_test(tcase, a_timer_set_again_forgets_the_time_before);
	tcase_add_test(tcase, timers_may_be_freed_in_calls);
	tcase_add_test(tcase, a_timer_that_sets_itself_lets_others_run);
	tcase_add_test(tcase, a_thousand_random_timers_come_in_the_order_of_their_times);
	tcase_add_test(tcase, a_task_queued_often_runs_once);
	tcase_add_test(tcase, tasks_may_queue_themselves_and_free_each_other);
	tcase_add_test(tcase, stopping_finishes_the_iteration);
	tcase_add_test(tcase, an_idle_loop_takes_no_processor_time);
	tcase_add_test(tcase, events_timers_and_tasks_allocate_nothing);
	return loop_main(argc, argv, tcase);
}
