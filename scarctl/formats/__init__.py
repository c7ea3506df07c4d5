"""Read and write the state files of other tools without running pickles: safetensors, .pt, DCP folders."""
