from .bundle import Bundle as Bundle
from .catalogue import Catalogue as Catalogue
from .catalogue import NamedUsers as NamedUsers
from .manifest import BundleError as BundleError
