"""Guest images: recipes, how one is built from Debian packages, and the cache of those that were built."""
