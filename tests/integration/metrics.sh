#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Metrics of a real daemon: both forms, against kvctl, promtool and a real Prometheus where they are; readers
# that are slow, wrong or many; addresses that can't be.
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

tools=$(realpath "$(dirname "$0")/../../tools")
holder=$build/tests/support/holder

# A port that nobody listens on now.
free_port()
{
	python3 -IS -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# get PATH [HEADER]: the body in $dir/out, the status line and headers in $dir/head
get()
{
	python3 -IS - "$port" "$1" "${2:-}" > "$dir/out" 2> "$dir/err" <<-'END' || fail "GET $1"
	import socket, sys
	s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20)
	s.sendall(f"GET {sys.argv[2]} HTTP/1.1\r\nHost: x\r\n{sys.argv[3]}\r\n".replace("\r\n\r\n\r\n", "\r\n\r\n").encode()
	          + (b"\r\n" if sys.argv[3] else b""))
	data = b""
	while part := s.recv(65536):
	    data += part
	head, _, body = data.partition(b"\r\n\r\n")
	assert f"Content-Length: {len(body)}".encode() in head, head
	sys.stderr.write(head.decode() + "\n")
	sys.stdout.write(body.decode())
	END
}

port=$(free_port)
daemon_start --host 64M --metrics "127.0.0.1:$port"
mkfifo "$dir/stdin"
exec 4<> "$dir/stdin"	# the holder stays until it is killed, or this test ends
"$holder" "a \"pool\" \\" 5 100 < "$dir/stdin" > "$dir/holder.out" 2>&1 &
holder_pid=$!
expect_soon 20 grep -q ready "$dir/holder.out"

say "every number is that of kvctl"
expect 0 "$kvctl" --json stats
cp "$dir/out" "$dir/stats.json"
get /metrics
expect_err '200 OK'
expect_err 'text/plain; version=0.0.4'
python3 -IS - "$dir/stats.json" "$dir/out" > "$dir/err" 2>&1 <<-'END' || fail "$(cat "$dir/err")"
	import json, re, sys
	stats = json.load(open(sys.argv[1]))
	metrics = {}
	for line in open(sys.argv[2]):
	    if not line.startswith("#"):
	        name, value = line.rsplit(" ", 1)
	        assert name not in metrics, name
	        metrics[name] = float(value)
	pool = stats["pools"][0]
	label = "pool=" + json.dumps(pool["name"])
	for state in ("free", "leased", "cached", "quarantined"):
	    assert metrics[f'kvcached_pool_blocks{{{label},state="{state}"}}'] == pool["blocks_" + state], state
	for name in ("block_bytes", "grants_total", "lookup_tokens_total", "hit_tokens_total"):
	    assert metrics[f"kvcached_pool_{name}{{{label}}}"] == pool[name], name
	gpu = stats["gpus"][0]
	for name in ("arena", "pools", "free", "scrubbing"):
	    assert metrics[f'kvcached_gpu_{name}_bytes{{gpu="0"}}'] == gpu["bytes_" + name], name
	session = stats["sessions"][0]
	mine = [v for k, v in metrics.items() if k.startswith("kvcached_session_blocks_leased{")]
	assert mine == [session["blocks_leased"]] and mine[0] > 0, mine
	count = metrics[f"kvcached_pool_refill_seconds_count{{{label}}}"]
	buckets = [v for k, v in metrics.items() if k.startswith("kvcached_pool_refill_seconds_bucket")]
	assert count > 0 and buckets == sorted(buckets) and buckets[-1] == count, buckets
	lookups = metrics[f"kvcached_pool_lookup_seconds_count{{{label}}}"]
	assert lookups > 0 and metrics[f"kvcached_pool_lookup_seconds_sum{{{label}}}"] > 0, lookups
	assert "kvcached_heap_bytes" in metrics
	# Every number of the stats is a metric, or a name among labels.
	text = open(sys.argv[2]).read()
	for kind, item in (("", stats["daemon"]), ("gpu_", gpu), ("pool_", pool), ("session_", session)):
	    for field in item:
	        word = re.sub(r"^n_|^bytes_|(_ns)?_total$|_ns$", "", field)
	        found = re.search(rf"kvcached_{kind}\w*{word}|kvcached_{kind}info\{{[^\n]*{field}=", text)
	        special = field in ("blocks_total", "evictions_total", "no_room_total", "since_ns", "name",
	                            "index", "id", "blocks_free", "blocks_leased", "blocks_cached",
	                            "blocks_quarantined", "pool", "client") or field.startswith("evictions_")
	        assert found or special, field
END
if command -v promtool > /dev/null; then
	expect 0 promtool check rules "$tools/metrics/kvcached-alerts.yml"
	get /metrics
	promtool check metrics < "$dir/out" > "$dir/lint" 2>&1 || fail "promtool: $(cat "$dir/lint")"
else
	say "no promtool here: its checks are left out"
fi

say "OpenMetrics for those who read it"
get /metrics "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
expect_err 'application/openmetrics-text; version=1.0.0'
[ "$(tail -n 1 "$dir/out")" = "# EOF" ] || fail "no # EOF at its end"
expect_out '^# TYPE kvcached_pool_hit_tokens counter$'
expect_out '^kvcached_pool_hit_tokens_total\{pool="a \\"pool\\" \\\\"\} '

say "the dashboard and the alerts name metrics that exist"
grep -oh 'kvcached_[a-z_]*' "$tools"/metrics/kvcached-*.{json,yml} | sort -u | while read -r name; do
	grep -q "^${name}[ {]" "$dir/out" || fail "there is no metric $name"
done || exit 1

say "what isn't GET /metrics is refused"
get /nothing
expect_err '404'
exec 3<> "/dev/tcp/127.0.0.1/$port"
printf 'POST /metrics HTTP/1.1\r\n\r\n' >&3
timeout 20 head -n 1 <&3 > "$dir/out"
expect_out '405'
exec 3<> "/dev/tcp/127.0.0.1/$port"
(head -c 9000 /dev/zero | tr '\0' 'x') >&3 2> /dev/null
timeout 20 head -n 1 <&3 > "$dir/out"
expect_out '431'
exec 3>&-

say "readers that don't read cost nobody else"
python3 -IS - "$port" > "$dir/slow.out" 2>&1 <<-'END' &
	import socket, sys, time
	held = []
	for i in range(40):
	    s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20)
	    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
	    if i % 2:
	        s.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
	    held.append(s)
	print("held", flush=True)
	time.sleep(60)
END
slow_pid=$!
expect_soon 20 grep -q held "$dir/slow.out"
for _ in 1 2 3; do
	get /metrics
	expect 0 "$kvctl" ping
	expect 0 "$kvctl" check
done
kill "$slow_pid"

if [ "${KV_TEST_EVENT_LOOP:-}" = epoll ]; then
	say "Prometheus scrapes the other event loop"
elif command -v prometheus > /dev/null; then
	say "a real Prometheus scrapes it"
	web=$(free_port)
	cat > "$dir/prometheus.yml" <<-END
	global:
	  scrape_interval: 1s
	rule_files: ["$tools/metrics/kvcached-alerts.yml"]
	scrape_configs:
	  - job_name: kvcached
	    static_configs:
	      - targets: ["127.0.0.1:$port"]
	END
	setpriv --pdeathsig KILL prometheus --config.file="$dir/prometheus.yml" \
		--storage.tsdb.path="$dir/tsdb" --web.listen-address="127.0.0.1:$web" \
		> "$dir/prometheus.log" 2>&1 &
	prometheus_pid=$!
	cat > "$dir/query.py" <<-'END'
	import json, sys, urllib.parse, urllib.request
	url = f"http://127.0.0.1:{sys.argv[1]}/api/v1/query?" + urllib.parse.urlencode({"query": sys.argv[2]})
	answer = json.load(urllib.request.urlopen(url, timeout=5))["data"]["result"]
	print(answer)
	sys.exit(not (answer and float(answer[0]["value"][1]) >= float(sys.argv[3])))
	END
	expect_soon 40 python3 -I "$dir/query.py" "$web" 'up{job="kvcached"}' 1
	expect_soon 20 python3 -I "$dir/query.py" "$web" 'sum(kvcached_pool_blocks{state="leased"})' 1
	expect_soon 20 python3 -I "$dir/query.py" "$web" \
		'histogram_quantile(0.99, sum by (le) (kvcached_pool_refill_seconds_bucket))' 0
	kill "$prometheus_pid"
	wait "$prometheus_pid" 2> /dev/null
else
	say "no prometheus here: the real scrape is left out"
fi
kill "$holder_pid"

say "an address that can't be is named"
for bad in nonsense 127.0.0.1: 127.0.0.1:x 300.0.0.1:9400 localhost:1 "127.0.0.1:$port"; do
	expect 1 "$build/daemon/kvcached" --host 16M --socket "$dir/other.sock" --metrics "$bad"
	expect_err "metrics: '$bad'"
done
daemon_stop
