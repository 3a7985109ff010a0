# SPDX-License-Identifier: Apache-2.0
"""gnsfast beside plain PyTorch: ``python -m benchmarks cpu``. A folder for each thing that is
measured, counted or studied. At the top lies what they share: ``measure`` times, ``record`` writes
and prints tables, ``apart`` runs a process, ``networks`` are trained, ``compile_*`` and ``no_gpu``
stand for a GPU.
"""
