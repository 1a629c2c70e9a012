/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Feeds a fuzz target the files and folders given: the corpus as a unit test. With -v it says what each reached, if
 * the target has words for that (fuzz_reached()).
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void fuzz_reached(FILE *f) __attribute__((weak));

static int verbose;

static int replay_file(const char *path)
{
	FILE *f = fopen(path, "rb");
	uint8_t *data = NULL;
	size_t n = 0, room = 0;

	if (!f) {
		perror(path);
		return -1;
	}
	do {
		if (n == room) {
			room = room ? 2 * room : 4096;
			data = realloc(data, room);
			if (!data)
				abort();
		}
		n += fread(data + n, 1, room - n, f);
	} while (n == room);
	fclose(f);
	/* A copy of the exact size, so that a read past the end is seen. */
	data = realloc(data, n ? n : 1);
	LLVMFuzzerTestOneInput(data, n);
	if (verbose && fuzz_reached) {
		printf("%s:", strrchr(path, '/') ? strrchr(path, '/') + 1 : path);
		fuzz_reached(stdout);
		printf("\n");
	}
	free(data);
	return 0;
}

int main(int argc, char **argv)
{
	int n_files = 0;

	verbose = argc > 1 && !strcmp(argv[1], "-v");
	for (int i = 1 + verbose; i < argc; i++) {
		struct dirent **entries;
		int n = scandir(argv[i], &entries, NULL, alphasort);
		char path[4096];

		if (n < 0) {
			if (replay_file(argv[i]))
				return 1;
			n_files++;
			continue;
		}
		for (int k = 0; k < n; k++) {
			snprintf(path, sizeof(path), "%s/%s", argv[i], entries[k]->d_name);
			if (entries[k]->d_name[0] != '.') {
				if (replay_file(path))
					return 1;
				n_files++;
			}
			free(entries[k]);
		}
		free(entries);
	}
	printf("replayed %d files\n", n_files);
	return n_files ? 0 : 1;
}
