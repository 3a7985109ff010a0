# SPDX-License-Identifier: Apache-2.0
"""What ``gpu_machine.py`` does on a bare GPU machine; the standard library alone."""
