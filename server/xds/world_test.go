package xds

import "github.com/isthmus-mesh/isthmus/plugin/collection"

const (
	entries   = collection.ServiceEntry
	workloads = collection.WorkloadEntry

	entriesV1     = "networking.istio.io/v1/ServiceEntry"
	entriesV1A3   = "networking.istio.io/v1alpha3/ServiceEntry"
	workloadsV1   = "networking.istio.io/v1/WorkloadEntry"
	meshConfigURL = "core/v1alpha1/MeshConfig"
)
