# SPDX-License-Identifier: Apache-2.0
"""Questions about noise scales that training runs or simulations answer, a command each."""
