"""Other people's trainers and engines, each in a folder that alone imports it."""
