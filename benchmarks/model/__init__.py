# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks model``: what norms cost on a GPU, counted and not measured."""
