#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The example of kvclient(3), compiled as it is printed there: the second run finds the prompt of the
# first in the cache, and computes the same output from it.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

example=$build/tests/integration/man_example

expect 1 "$example"
expect_err "$socket"

daemon_start --host 256M
expect 0 "$example"
expect_out '^0 of 100 tokens were cached; the last output is -?[0-9.]+$'
first=$(sed 's/.*output is //' "$dir/out")
expect 0 "$example"
expect_out "^96 of 100 tokens were cached; the last output is $first$"
expect 0 "$kvctl" check
daemon_stop
