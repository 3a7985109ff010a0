# SPDX-License-Identifier: Apache-2.0
"""gnsfast beside plain PyTorch: ``python -m benchmarks cpu`` or ``pytest benchmarks
--benchmark-only``.
"""
