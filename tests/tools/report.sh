#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# kvctl report: what the daemon remembers agrees with its counters, and a real browser shows the plots of it, below what
# is wrong now (without chromium the page itself is looked at).
# shellcheck source=tests/support/daemon.sh
. "$(dirname "$0")/../support/daemon.sh"

page=$dir/report.html
daemon_start --host 256M
expect 0 "$kvctl" report "$page"
grep -q 'There is no pool' "$page" || fail "an empty daemon's page"

say "two prompts, some samples apart"
prompt="The report of a cache shows what was asked for, what was found, and what had to go."
engine=("$build/tools/engine/kvengine" --model tiny --pool 'a<b>&c' --device host --socket "$socket" -n 64)
expect 0 "${engine[@]}" --prompt "$prompt"
samples()
{
	"$kvctl" --json report "$page" | python3 -IS -c '
import json, sys
x = json.load(sys.stdin)["samples"]
sys.exit(not (len(x) >= int(sys.argv[1]) and x[0]["ago_ns"] > x[-1]["ago_ns"]))' "$1"
}
export -f samples
export kvctl page
expect_soon 60 bash -c 'samples 2'
expect 0 "${engine[@]}" --prompt "$prompt"
expect_soon 60 bash -c 'samples 5'
expect 0 "$kvctl" --json report "$page"
cp "$dir/out" "$dir/report.json"
expect 0 "$kvctl" --json stats
python3 -IS - "$dir/report.json" "$dir/out" <<-'END' || fail "the history and the counters differ"
	import json, sys
	last, pool = json.load(open(sys.argv[1]))["samples"][-1], json.load(open(sys.argv[2]))["pools"][0]
	assert last["pool_id"] == pool["id"]
	for name in ("lookup_tokens_total", "hit_tokens_total", "published_total", "blocks_cached"):
	    assert last[name] == pool[name] > 0, name
END
expect 1 "$kvctl" report /nonexistent/report.html
expect_err '/nonexistent/report.html: No such file'

! grep -q '<p class="trouble"' "$page" || fail "a trouble where there is none"

say "the page: plots with lines in them, names that are no markup, nothing that is fetched"
cat > "$dir/look.py" <<-'END'
	import re, sys
	dom = open(sys.argv[1], encoding="utf-8").read()
	paths = re.findall(r'<path class="line"[^>]*? d="([^"]*)"', dom)
	assert dom.count("<svg") == 4 and len(paths) == 9, (dom.count("<svg"), len(paths))
	for path in paths:
	    points = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)
	    assert len(points) >= 4, path
	    assert all(-1 <= float(x) <= 721 and -1 <= float(y) <= 161 for x, y in points), path
	memory, tokens = ([float(y) for _, y in re.findall(r"L(-?[\d.]+) (-?[\d.]+)", path)] for path in (paths[0], paths[4]))
	assert min(memory) < 100, "the memory's plot is empty"
	assert min(tokens) < 100, "the hits' plot is empty"
	assert "a&lt;b&gt;&amp;c" in dom or "a&lt;b>&amp;c" in dom
	assert not re.search(r"<script|<link rel=.stylesheet|src=|https?:", dom)
END
expect 0 python3 -IS "$dir/look.py" "$page"

if command -v chromium > /dev/null; then
	say "as a browser shows it"
	command_deadline=120
	browser=(chromium --headless --no-sandbox --disable-gpu --no-first-run --user-data-dir="$dir/profile"
		--enable-logging=stderr --hide-scrollbars "--window-size=1000,1600")
	expect 0 "${browser[@]}" --dump-dom "file://$page"
	cp "$dir/out" "$dir/dom.html"
	! grep CONSOLE "$dir/err" || fail "the browser complains"
	expect 0 python3 -IS "$dir/look.py" "$dir/dom.html"
	# Each plot has a size, and in it its lines: asked of the browser's own layout.
	sed 's|</body>|<script>document.title = JSON.stringify([...document.querySelectorAll("svg")].map(s => [\
		s.getBoundingClientRect().width, s.getBoundingClientRect().height,\
		Math.max(...[...s.querySelectorAll("path")].map(p => p.getTotalLength()))]))</script>&|' \
		"$page" > "$dir/measured.html"
	expect 0 "${browser[@]}" --dump-dom "file://$dir/measured.html"
	python3 -IS - "$dir/out" <<-'END' || fail "the plots have no size"
	import json, re, sys
	sizes = json.loads(re.search(r"<title>(.*?)</title>", open(sys.argv[1]).read())[1])
	print(sizes)
	assert len(sizes) == 4 and all(w > 400 and h > 80 and length > 300 for w, h, length in sizes), sizes
	END
	expect 0 "${browser[@]}" --screenshot="${KV_TEST_SCREENSHOT:-$dir/report.png}" "file://$page"
	[ -s "${KV_TEST_SCREENSHOT:-$dir/report.png}" ] || fail "no screenshot"
else
	say "no chromium here: what a browser makes of it is left out"
fi

say "what is wrong stands on the first lines, and what to do"
mkfifo "$dir/hold"
exec 9<> "$dir/hold"
hold()	# FILE BLOCKS
{
	"$build/tests/support/holder" 'busy<i>' "$2" 0 < "$dir/hold" > "$1" 2>&1 9>&- &
}
hold "$dir/first" 3000
first=$!
expect_soon 20 grep -q ready "$dir/first"
expect 0 "$kvctl" pool set 'busy<i>' --max 56M
hold "$dir/second" 1500
second=$!
kill -STOP "$first"
expect_soon 20 sh -c "'$kvctl' stats | grep -q 'waits for room'"
expect 0 "$kvctl" report "$page"
cat > "$dir/wrong.py" <<-'END'
	import html, re, sys
	dom = open(sys.argv[1], encoding="utf-8").read()
	body = dom[dom.index("<h1>"):dom.index("<section>")]
	said = [html.unescape(re.sub("<[^>]*>", " ", p)) for p in re.findall("<p class=\"trouble\">(.*?)</p>", body)]
	assert body.index("trouble") < body.index("version"), body
	assert len(said) == 2 == dom.count('<p class="trouble"'), said
	assert "busy<i>: 1 request waits for room; it is at its maximum, 56.0 MiB" in said[0], said
	assert "-> kvctl pool set busy<i> --max SIZE" in said[0], said
	assert re.search(rf"\(holder, pid {sys.argv[2]}\) is stopped .* -> kill -CONT {sys.argv[2]} ", said[1]), said
END
expect 0 python3 -IS "$dir/wrong.py" "$page" "$first"
if command -v chromium > /dev/null; then
	expect 0 "${browser[@]}" --dump-dom "file://$page"
	cp "$dir/out" "$dir/dom.html"
	expect 0 python3 -IS "$dir/wrong.py" "$dir/dom.html" "$first"
	# Before anything is scrolled, above all plots, in the browser's own layout.
	sed 's|</body>|<script>document.title = JSON.stringify([...document.querySelectorAll(".trouble, section")].map(s => [\
		s.className, s.getBoundingClientRect().top, s.getBoundingClientRect().height, s.innerText]))</script>&|' \
		"$page" > "$dir/measured.html"
	expect 0 "${browser[@]}" --dump-dom "file://$dir/measured.html"
	python3 -IS - "$dir/out" <<-'END' || fail "the troubles aren't seen first"
	import html, json, re, sys
	boxes = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", open(sys.argv[1]).read(), re.S)[1]))
	print([box[:3] for box in boxes])
	troubles, rest = boxes[:2], boxes[2:]
	assert all(name == "trouble" and height > 30 and "->" in text for name, _, height, text in troubles), troubles
	assert max(top for _, top, _, _ in troubles) < min(top for _, top, _, _ in rest) and troubles[0][1] < 150, boxes
	END
fi
kill -CONT "$first"
kill -KILL "$second"
exec 9>&-
wait "$first" || fail "the client that was stopped failed"
expect 0 "$kvctl" report "$page"
! grep -q '<p class="trouble"' "$page" || fail "a trouble that is over"
expect 0 "$kvctl" check
daemon_stop
