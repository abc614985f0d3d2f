class ConfigException(Exception):
    pass


def load_kube_config():
    pass
