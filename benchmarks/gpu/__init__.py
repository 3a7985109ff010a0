# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks gpu``: the kernels on a GPU, first right, then fast."""
