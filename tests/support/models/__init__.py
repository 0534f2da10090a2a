"""Small models, for one device and for meshes."""
