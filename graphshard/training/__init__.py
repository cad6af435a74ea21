"""What a training loop needs beside a step: clipping, scaling, optimizers, full weights."""
