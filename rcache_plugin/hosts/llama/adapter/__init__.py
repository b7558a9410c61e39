"""The shared object that takes the place of a class of libllama: found, built, checked."""
