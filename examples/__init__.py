# SPDX-License-Identifier: Apache-2.0
"""Programs to read and run. Benchmarks import the model and the text of the demo."""
