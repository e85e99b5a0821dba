"""The CUDA caching allocator as a model over integers, and recorded histories that it is held against. No torch."""
