from ..batch import Fresh as Fresh
from .dynamic import Dynamic as Dynamic
from .dynamic import DynamicIds as DynamicIds
from .embeddings import DynamicEmbeddings as DynamicEmbeddings
