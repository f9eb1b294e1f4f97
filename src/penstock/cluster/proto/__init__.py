"""etcd's messages as classes, generated from ``etcd.proto`` beside this file (``make proto``); never edited."""
