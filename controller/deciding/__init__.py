"""Profile and present plan in, next plan out, with its reason in words. Pure."""
