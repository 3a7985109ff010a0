# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks families``: architectures of transformers and timm, as they are."""
