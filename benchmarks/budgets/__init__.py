# SPDX-License-Identifier: Apache-2.0
"""Committed counts, and what counts them: ``python -m benchmarks budgets``."""
