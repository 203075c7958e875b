module github.com/isthmus-mesh/isthmus/tools/mcs-api

go 1.26.0

require sigs.k8s.io/mcs-api v0.5.2
