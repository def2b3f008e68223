#!/usr/bin/env bash
# On a machine with a CUDA GPU and the project installed: the same-curve test and the training benchmark, in under
# 8 minutes. Prints the figures for benchmarks/README.md.
set -euo pipefail
cd "$(dirname "$0")/.."
python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA GPU is visible to torch")'
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python -c 'import torch, deepspeed; print("torch", torch.__version__, "deepspeed", deepspeed.__version__)'
# One process with each GPU's accelerator; float32 products must not be rounded to TF32 for the curves to agree.
NVIDIA_TF32_OVERRIDE=0 timeout 240 python -m pytest -q -m 'matrix or not matrix' \
  'tests/training/test_same_curve.py::test_every_stage_micro_batch_restart_and_depth_follows_plain_torch[1]'
timeout 240 python benchmarks/training.py --device cuda --rows 32 --repeats 10 --skip-processes
