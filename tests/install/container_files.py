#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""container_files.py BUILD: compose.yaml and kubernetes.yaml say things that the programs know, and hang together.

Where kubernetes-validate (PyPI) is there, its schemas look at the latter too.
"""
import pathlib, re, subprocess, sys

try:
    import yaml
except ImportError:
    print("skipped: no yaml here")
    sys.exit(77)

build = pathlib.Path(sys.argv[1])
folder = pathlib.Path(__file__).resolve().parents[2] / "tools/container"
programs = {"kvcached": build / "daemon/kvcached", "kvctl": build / "tools/kvctl", "kvengine": build / "tools/engine/kvengine"}
helps = {name: subprocess.run([path, "--help"], capture_output=True, text=True, check=True).stdout
         for name, path in programs.items()}


def check_command(words, where):
    assert words[0] in helps, (where, words)
    for word in words[1:]:
        if word.startswith("--"):
            assert re.search(re.escape(word.split("=")[0]) + r"\b", helps[words[0]]), (where, word)


# The image's entry point and health check, as the compose file and pods take them over.
docker = (folder / "Dockerfile").read_text()
entry = re.search(r"^ENTRYPOINT (\[.*\])", docker, re.M)[1]
entry = yaml.safe_load(entry)
check_command(entry + yaml.safe_load(re.search(r"^CMD (\[.*\])", docker, re.M)[1]), "Dockerfile")
assert entry[:3] == ["kvcached", "--socket", "/run/kvcached/kvcached.sock"], entry
check_command(yaml.safe_load(re.search(r"^HEALTHCHECK .* CMD (\[.*\])", docker, re.M)[1]), "Dockerfile")

compose = yaml.safe_load((folder / "compose.yaml").read_text())
for name, service in compose["services"].items():
    check_command(service.get("entrypoint", entry) + service["command"], name)
    for volume in service["volumes"]:
        source, target = volume.split(":")
        assert source in compose["volumes"] and target == "/run/kvcached", (name, volume)
    assert set(service.get("depends_on", {})) <= set(compose["services"]), name
assert (folder / compose["services"]["kvcached"]["build"]["context"] / "tools/container/Dockerfile").exists()

documents = list(yaml.safe_load_all((folder / "kubernetes.yaml").read_text()))
assert [d["kind"] for d in documents] == ["DaemonSet", "Deployment"], [d["kind"] for d in documents]
paths = set()
for d in documents:
    assert d["spec"]["selector"]["matchLabels"].items() <= d["spec"]["template"]["metadata"]["labels"].items()
    pod = d["spec"]["template"]["spec"]
    volumes = {v["name"]: v for v in pod["volumes"]}
    for c in pod["containers"]:
        if d["kind"] == "DaemonSet":
            check_command(entry + c["args"], c["name"])
        for probe in ("readinessProbe", "livenessProbe"):
            if probe in c:
                check_command(c[probe]["exec"]["command"], probe)
        assert {m["name"] for m in c["volumeMounts"]} <= set(volumes), c["name"]
        assert any(m["mountPath"] == "/run/kvcached" for m in c["volumeMounts"]), c["name"]
    paths |= {v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
assert len(paths) == 1, f"daemon and engine mount different folders: {paths}"

try:
    import kubernetes_validate
except ImportError:
    print("kubernetes-validate isn't here: its schemas were left out")
else:
    for d in documents:
        kubernetes_validate.validate(d, kubernetes_validate.latest_version(), strict=True)
    print("schemas of Kubernetes", kubernetes_validate.latest_version(), "are met")
