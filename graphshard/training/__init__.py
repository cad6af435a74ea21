"""The parts of a training loop beside a step: clipping, scaling, optimizers, full weights."""
