# SPDX-License-Identifier: Apache-2.0
"""Where the optional CUDA extension ``gnsfast._C`` is built once ``csrc/`` has kernels; until then
pure Python.
"""

from setuptools import setup

setup()
