from ..batch import Fresh as Fresh
from .dynamic import DynamicIds as DynamicIds
from .embeddings import DynamicEmbeddings as DynamicEmbeddings
from .policy import Dynamic as Dynamic
from .strings import string_ids as string_ids
