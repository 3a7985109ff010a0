# SPDX-License-Identifier: Apache-2.0
"""From a noise scale to a batch size: what to train with, what it costs, how it was measured."""
