# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, a file per operator; installed as ``gnsfast.triton_kernels``."""

if __name__ != "gnsfast.triton_kernels":
    raise ImportError(
        "this is gnsfast's folder of Triton kernels: import gnsfast.triton_kernels. The package "
        "triton_kernels is another project; start Python outside of gnsfast's checkout to import "
        "it."
    )
