"""What specs call the precisions of floating-point numbers."""

BF16, FP16, FP32 = "bf16", "fp16", "fp32"
