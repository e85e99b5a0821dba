"""The shape of timm's vit_huge_patch14_224, and the classes that it is fine-tuned for."""

HIDDEN, LAYERS, HEADS, PATCH, SIDE, CLASSES = 1280, 32, 16, 14, 224, 45
