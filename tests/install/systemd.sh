#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# What is installed, under a real systemd with all of the unit's sandbox: a machine of its own boots from this
# one's /usr (systemd-nspawn, volatile), a client's first call starts the service, and worker and keeper are
# killed and stopped there. WatchdogSec= is shorter than in the unit; all else is as it is installed.
#
# usage: systemd.sh BUILD_FOLDER
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

[ "$(id -u)" = 0 ] || skip "root is needed"
command -v systemd-nspawn > /dev/null || skip "no systemd-nspawn (package systemd-container)"
command -v meson > /dev/null || skip "no meson"
expect 0 env DESTDIR="$dir/image" meson install -C "$build" --no-rebuild --quiet
[ -e "$dir/image/usr/local/sbin/kvcached" ] || skip "the prefix is not /usr/local"

mkdir -p "$dir/units/kvcached.service.d" "$dir/units/kvcached.socket.d" "$dir/seen"
cat > "$dir/units/kvcached.service.d/test.conf" <<- 'END'
	[Service]
	WatchdogSec=4
	Environment="KVCACHED_OPTIONS=--host 64M"
END
cat > "$dir/units/seen.service" <<- 'END'
	[Unit]
	Requires=basic.target
	After=basic.target
	[Service]
	Type=oneshot
	ExecStart=/bin/bash /seen/steps.sh
	ExecStopPost=/usr/bin/systemctl poweroff --force --force
	StandardOutput=append:/seen/log
	StandardError=append:/seen/log
	TimeoutStartSec=120
END
cat > "$dir/seen/steps.sh" <<- 'END'
	export PATH=$PATH:/usr/local/bin:/usr/local/sbin
	service() { systemctl show -P "$1" kvcached.service; }
	worker() { kvctl -t 2 --json stats 2> /dev/null | sed -n 's/.*"worker_pid": *\([0-9]*\).*/\1/p'; }
	# SECONDS COMMAND...
	soon() { local until=$((SECONDS + $1)); shift; until "$@"; do ((SECONDS < until)) || exit 1; sleep 0.2; done; }
	other_worker() { local now; now=$(worker); [ -n "$now" ] && [ "$now" != "$was" ]; }
	restarts() { [ "$(service NRestarts)" = "$1" ] && kvctl -t 5 ping > /dev/null 2>&1; }
	set -u
	LD_LIBRARY_PATH=$(dirname "$(find /usr/local/lib* -name libkvclient.so.0 | head -n 1)")
	export LD_LIBRARY_PATH
	systemctl start kvcached.socket || exit 1
	echo "before: $(service ActiveState)"
	kvctl -t 30 ping || exit 1
	echo "after: $(service ActiveState), $(service StatusText)"
	keeper=$(service MainPID)
	grep -E '^(Uid|CapEff|CapBnd|NoNewPrivs|Seccomp):' "/proc/$keeper/status"
	kvctl bench lease > /dev/null || exit 1
	echo "blocks were leased"
	was=$(worker); kill -KILL "$was"; soon 20 other_worker
	echo "worker killed: another serves, restarts $(service NRestarts)"
	was=$(worker); kill -STOP "$was"; soon 30 other_worker
	echo "worker stopped: another serves, restarts $(service NRestarts)"
	kill -KILL "$keeper"; soon 20 restarts 1
	echo "keeper killed: restarts $(service NRestarts)"
	kill -STOP "$(service MainPID)"; soon 30 restarts 2
	echo "keeper stopped: restarts $(service NRestarts)"
	systemctl stop kvcached.service
	echo "stopped: $(service ActiveState) $(service Result)"
	kvctl -t 30 ping || exit 1
	echo "again: $(service ActiveState)"
	systemctl stop kvcached.socket kvcached.service
	echo "done: $(ls /run/kvcached)"
END

say "a machine boots"
# Where this machine's own systemd runs, the other one gets a scope from it.
keep=(--keep-unit)
[ ! -d /run/systemd/system ] || keep=()
command_deadline=170
timeout -k 5 150 systemd-nspawn --quiet -D / --volatile=yes --boot --register=no "${keep[@]}" --console=pipe \
	--machine="kvcached-test-$$" --link-journal=no --bind-ro="$dir/image/usr/local:/usr/local" \
	--bind-ro="$dir/units:/etc/systemd/system" --bind="$dir/seen:/seen" systemd.unit=seen.service \
	> "$dir/boot" 2>&1 < /dev/null
cp "$dir/seen/log" "$dir/out" 2> /dev/null
[ -s "$dir/seen/log" ] || skip "systemd doesn't boot here: $(tail -n 2 "$dir/boot")"

say "the first call starts it, with no capability, as a user of its own"
for line in 'before: inactive' 'after: active, worker [0-9]+ serves' 'Uid:\s+[1-9]' 'CapEff:\s+0+$' 'CapBnd:\s+0+$' \
	'NoNewPrivs:\s+1' 'Seccomp:\s+2' 'blocks were leased'; do
	expect_out "^$line"
done
say "who is killed or stuck is replaced: a worker by the keeper, the keeper by systemd"
for line in 'worker killed: another serves, restarts 0' 'worker stopped: another serves, restarts 0' \
	'keeper killed: restarts 1' 'keeper stopped: restarts 2'; do
	expect_out "^$line"
done
say "a stop is clean, and the next call starts it again"
for line in 'stopped: inactive success' 'again: active' 'done: $'; do
	expect_out "^$line"
done
