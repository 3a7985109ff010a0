# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks cpu`` and ``updates``: time and memory on this CPU, beside plain torch."""
