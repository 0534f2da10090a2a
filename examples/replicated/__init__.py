"""Replicas of a server on Ray Serve, in reading order: the beginnings of texts
(`prefixes`), who gets a request (`routing`), what goes to a replica (`forwarding`), the
engine in each (`replica`), the one address in front of them (`endpoint`), how many
there are (`scaling`), and the application (`application`). `prefixes` needs no Ray.
"""
