"""The operators as Triton kernels, for tensors on a GPU, with the bits of the CPU kernels.

`gpu_kernels`, outside this folder, chooses between these kernels and `formula`. Nothing else imports this folder,
because it imports the package triton.

    rounding    the rounding rules, and conversions of results to 16 bits
    qparams     how observed ranges become scales and zero points
    tiles       which elements a program handles, and which scale belongs to each
    launch      how kernels are started

    fake_quantize, codes, observe, learned      kernels, and the functions of `tensor_kernels` that start them

Results do not depend on the GPU or on the run: divisions are correctly rounded, nothing is contracted or flushed to
zero, and sums have an order that depends on the shape alone. No function waits for the GPU or reads from it.
"""
