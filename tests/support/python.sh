#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a test with the Python that has packages: .venv's, which tools/setup --python may make at any time, or else the
# distribution's.
python=$(dirname "$0")/../../.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" "$@"
