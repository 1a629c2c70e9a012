#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvctl doctor finds what is wrong, where something really is: low limits, calls that a seccomp filter
# refuses, sockets and folders that aren't right, daemons and drivers that are stuck.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

deny=$build/tests/support/deny

# A finding of the last `expect`, in its JSON: probe, verdict, patterns of what was seen and what to change.
found()
{
	python3 -IS -c '
import json, re, sys
probe, verdict, seen, change = sys.argv[1:5]
answer = json.load(open(sys.argv[5]))
order = ["ok", "warn", "fail"]
findings = answer["findings"]
assert answer["worst"] == max((f["verdict"] for f in findings), key=order.index), "worst"
for v in order:
    assert answer["n_" + v] == sum(f["verdict"] == v for f in findings), "counts"
assert all(f["change"] for f in findings if f["verdict"] != "ok"), "a finding without a change"
assert any(f["probe"] == probe and f["verdict"] == verdict and re.search(seen, f["seen"]) and
           re.search(change, f["change"]) for f in findings), "not found in %s" % findings
' "$1" "$2" "$3" "${4:-}" "$dir/out" 2> "$dir/json.err" || fail "$1 $2 '$3' '${4:-}': $(cat "$dir/json.err")"
}

# STATUS PROBE [COMMAND...]: the probe alone, run by a command, in JSON
doctor()
{
	local status=$1 probe=$2

	shift 2
	expect "$status" "$@" "$kvctl" --json doctor "$probe"
	[ ! -s "$dir/err" ] || fail "doctor $probe: words on stderr"
}

say "words: both forms, options on both sides, names of probes"
expect 2 "$kvctl" doctor nonsense
expect_err "no probe is called 'nonsense'"
expect 0 "$kvctl" doctor help
expect_out '^  pid-namespaces '
expect 0 "$kvctl" doctor kernel memfd
expect_out '^ok    kernel '
expect_out '^ok    memfd '
expect_out '^[0-9]+ ok, 0 to look at, 0 failed'
expect 0 "$kvctl" doctor memfd --json
expect_json
found memfd ok 'truncating it is refused'

say "no daemon: everything else is tried"
expect 4 "$kvctl" --json doctor
expect_json
found socket warn 'No such file' 'start kvcached'
found daemon warn 'nobody to ask' 'see socket'
found pidfd ok 'killed process is seen'
found handles ok 'host: a sealed memfd'
found ptrace ok 'needs ptrace'
found memory ok 'huge pages'

say "limits"
doctor 1 limits prlimit --nofile=300
found limits fail '300 at most' 'LimitNOFILE=65536'
doctor 4 limits prlimit --nofile=812
found limits warn 'enough for 100 clients of 1024' 'ulimit -Hn'
doctor 4 limits prlimit --nproc=100
found limits warn 'RLIMIT_NPROC.: 100' 'ulimit -u'
doctor 1 limits prlimit --fsize=65536
found limits fail 'RLIMIT_FSIZE.: 65536' 'ulimit -f unlimited'
doctor 1 memfd prlimit --fsize=65536
found memfd fail 'File too large' 'ulimit -f unlimited'
if [ -z "${KV_TEST_SANITIZED:-}" ]; then # which needs terabytes of addresses
	doctor 1 limits prlimit --as=8589934592
	found limits fail 'RLIMIT_AS' 'ulimit -v'
fi

if "$deny" unshare -- true; then
	say "calls that are refused"
	doctor 4 io_uring "$deny" io_uring_setup --
	found io_uring warn 'io_uring_setup: Operation not permitted' 'io_uring'
	doctor 4 io_uring "$deny" io_uring_enter --
	found io_uring warn 'io_uring_enter: Operation not permitted' 'io_uring'
	doctor 1 pidfd "$deny" pidfd_open --
	found pidfd fail 'pidfd_open: Operation not permitted' 'allow pidfd_open'
	doctor 1 memfd "$deny" memfd_create --
	found memfd fail 'memfd_create: Operation not permitted' 'allow memfd_create'
	doctor 4 kernel "$deny" membarrier --
	found kernel warn 'membarrier' 'allow membarrier'
	doctor 1 kernel "$deny" execveat --
	found kernel fail 'execveat' 'allow execveat'
	doctor 4 pid-namespaces "$deny" unshare --
	found pid-namespaces warn 'not tried: unshare' 'CAP_SYS_ADMIN'
else
	say "no seccomp filter can be set here: calls that are refused are not tried"
fi
if unshare -pf --mount-proc true 2> "$dir/err"; then
	doctor 0 pid-namespaces
	found pid-namespaces ok 'host: made in one PID namespace, used in another'
fi

say "drivers that aren't well"
mkdir "$dir/lib"
cp "$build/tests/tools/libfalse_cuda.so" "$dir/lib/libcuda.so.1"
start=$SECONDS
expect 1 env LD_LIBRARY_PATH="$dir/lib" FALSE_CUDA=hangs "$kvctl" --json -t 1 doctor driver sharing handles
[ $((SECONDS - start)) -lt 20 ] || fail "a driver that hangs held doctor up"
found driver fail 'no answer within 1.0 s' 'dmesg'
found handles warn 'not tried: the driver does not answer' 'see what driver says'
if [ -z "${KV_TEST_SANITIZED:-}" ]; then # which makes another end of it
	doctor 1 driver env LD_LIBRARY_PATH="$dir/lib" FALSE_CUDA=crashes
	found driver fail 'ended by signal 11' 'dmesg'
fi
doctor 1 driver env LD_LIBRARY_PATH="$dir/lib" FALSE_CUDA=803
found driver fail 'CUDA error 803, CUDA_ERROR_OF_A_TEST' 'cuda-compat'
doctor 1 driver env LD_LIBRARY_PATH="$dir/lib" FALSE_CUDA=well
found driver ok 'CUDA 13.0'
found driver ok 'GPU 0: False GPU, GPU-11111111-1111.*, 80.0 GiB; vmm: yes'
found driver fail 'GPU 1: False GPU.* compute mode exclusive' 'nvidia-smi -i GPU-22222222-.* -c DEFAULT'

say "MPS"
mkdir "$dir/mps"
: > "$dir/mps/control"
doctor 4 sharing env CUDA_MPS_PIPE_DIRECTORY="$dir/mps"
found sharing warn 'MPS server is in reach' 'CUDA_MPS_PIPE_DIRECTORY'

say "sockets"
doctor 4 socket env -u KVCACHED_SOCKET -u XDG_RUNTIME_DIR KVCACHED_SOCKET="$dir/none/s.sock"
found socket warn 'none: No such file' 'mkdir -m 0755'
long=$dir/$(printf 'x%.0s' {1..200})
expect 1 "$kvctl" -s "$long" --json doctor socket
found socket fail 'has [0-9]+ bytes' 'shorter'
: > "$dir/file.sock"
expect 1 "$kvctl" -s "$dir/file.sock" --json doctor socket
found socket fail 'is no socket' 'move it away'
python3 -IS - "$dir/other.sock" "$dir/stuck.sock" <<- 'END' > "$dir/listeners" &
	import socket, sys, time
	a = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
	a.bind(sys.argv[1]); a.listen()
	b = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
	b.bind(sys.argv[2]); b.listen()
	print("ready", flush=True)
	time.sleep(60)
END
listeners=$!
expect_soon 20 grep -q ready "$dir/listeners"
expect 1 "$kvctl" -s "$dir/other.sock" --json doctor socket
found socket fail 'wrong type' 'another program listens'
start=$SECONDS
expect 1 "$kvctl" -s "$dir/stuck.sock" --json -t 1 doctor daemon
[ $((SECONDS - start)) -lt 20 ] || fail "a daemon that doesn't answer held doctor up"
found daemon fail 'no answer' 'log'
kill $listeners
wait $listeners 2> /dev/null
expect 4 "$kvctl" -s "$dir/stuck.sock" --json doctor socket
found socket warn 'nobody listens' 'start kvcached'
mkdir -m 0777 "$dir/open"
chmod 0777 "$dir/open"
expect 1 "$kvctl" -s "$dir/open/s.sock" --json doctor socket
found socket fail 'mode 0777.: everybody may put another' 'chmod o-w'

say "a daemon"
daemon_start --host 64M --socket-mode 0600
doctor 0 socket
found socket ok 'mode 0600.*listens'
doctor 0 daemon
found daemon ok 'kvcached [0-9.]+, keeper [0-9]+, worker [0-9]+, (io_uring|epoll), 0 pools'
doctor 0 versions
found versions ok 'the daemon is .* as well; protocol [0-9]+, shared pages [0-9]+'
doctor 0 versions env LD_LIBRARY_PATH="$build/libclient"
found versions ok 'libkvclient.so.0 is .*, as kvctl'
chmod 0666 "$socket"
doctor 4 socket
found socket warn 'every user may connect' 'socket-mode 0660'
chmod 0600 "$socket"
if [ "$(id -u)" = 0 ] && chmod 0755 "$dir" && setpriv --reuid 65534 --clear-groups "$kvctl" --version > /dev/null 2>&1; then
	doctor 1 socket setpriv --reuid 65534 --clear-groups
	found socket fail 'refuses user 65534' 'socket-mode'
	chmod 0700 "$dir"
	doctor 1 socket setpriv --reuid 65534 --clear-groups
	found socket fail "$dir .mode 0700.* can't be entered by user 65534" 'chmod a\+x'
fi
kill -KILL "$(worker_pid)"
expect_soon 20 "$kvctl" ping
doctor 4 daemon
found daemon warn '1 workers before this one have ended' 'was ended by'

say "its GPUs, and those that this process sees"
doctor 0 devices
found devices ok "memory is the host's"
# A daemon that welcomes as this one does, and has the GPU with the UUID $2.
cat > "$dir/other_gpu.py" <<- 'END'
	import socket, sys
	path, real, uuid = sys.argv[1:4]
	listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
	listener.bind(path); listener.listen()
	print("ready", flush=True)
	listener.settimeout(60)
	peer = listener.accept()[0]
	peer.settimeout(60)
	daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
	daemon.settimeout(60)
	daemon.connect(real)
	daemon.send(peer.recv(1 << 16))
	welcome = bytearray(daemon.recv(1 << 16))
	at = 56 + 72 # of gpus[0].uuid in struct kv_msg_welcome
	assert welcome[56 + 8:].startswith(b"host memory"), welcome[56:128]
	welcome[at:at + len(uuid)] = uuid.encode()
	peer.send(welcome)
END
# UUID STATUS [COMMAND...]
devices()
{
	local uuid=$1 status=$2 relay

	shift 2
	rm -f "$dir/gpu.sock" "$dir/relay"
	python3 -IS "$dir/other_gpu.py" "$dir/gpu.sock" "$socket" "$uuid" > "$dir/relay" 2> "$dir/relay.err" &
	relay=$!
	expect_soon 20 grep -q ready "$dir/relay"
	expect "$status" "$@" "$kvctl" -s "$dir/gpu.sock" --json doctor devices
	wait $relay || fail "the relay: $(cat "$dir/relay.err")"
}
two=GPU-22222222-2222-2222-2222-222222222222
other=GPU-33333333-3333-3333-3333-333333333333
devices $two 0 env LD_LIBRARY_PATH="$dir/lib" FALSE_CUDA=well
found devices ok "GPU 0 of the daemon, $two, is CUDA device 1 here"
devices $other 4 env -u CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH="$dir/lib" FALSE_CUDA=well
found devices warn "$other, is none of the 2 that CUDA shows here: its pools" "docker run --gpus .*device=$other"
devices $other 4 env CUDA_VISIBLE_DEVICES=0,1 LD_LIBRARY_PATH="$dir/lib" FALSE_CUDA=well
found devices warn 'none of the 2 .*CUDA_VISIBLE_DEVICES=0,1' "export CUDA_VISIBLE_DEVICES=$other"
devices $two 4 env LD_LIBRARY_PATH="$dir/lib" FALSE_CUDA=100
found devices warn "$two: CUDA does not start here" 'see what driver says'
daemon_stop
