"""Replicas of a server on Ray Serve, in reading order: the beginnings of texts
(`prefixes`), the choice of a replica (`routing`), its request (`forwarding`), the
engine in each (`replica`), the one address in front of them (`endpoint`), how many
there are (`scaling`), and the application (`application`). `prefixes` needs no Ray.
"""
