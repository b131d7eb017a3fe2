"""RLHFless: plan every step of synchronous RLHF before it starts, then carry the same plan out anywhere."""
