# SPDX-License-Identifier: Apache-2.0
"""Makes kvclient/_abi.py from the C headers before the package is collected.

The headers are those of this checkout, or of $KVCLIENT_INCLUDE. With $KVCLIENT_BUNDLE set to a
libkvclient.so the wheel brings that library along, and is for this platform only.
"""
import os
import shutil
import sys
import sysconfig

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

INCLUDE = os.environ.get("KVCLIENT_INCLUDE", os.path.join(HERE, "..", "..", "include"))
BUNDLE = os.environ.get("KVCLIENT_BUNDLE")


class Build(build_py):
    def run(self):
        super().run()
        import build_abi

        folder = os.path.join(self.build_lib, "kvclient")
        build_abi.generate(INCLUDE, os.path.join(folder, "_abi.py"))
        if BUNDLE:
            shutil.copyfile(BUNDLE, os.path.join(folder, "libkvclient.so.0"))


options = {}
if BUNDLE:
    options["bdist_wheel"] = {"plat_name": sysconfig.get_platform()}
setup(cmdclass={"build_py": Build}, options=options)
