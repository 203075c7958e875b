module github.com/isthmus-mesh/isthmus/test/validity/oldest

go 1.15

replace (
	github.com/docker/distribution => github.com/docker/distribution v2.7.1+incompatible
	github.com/evanphx/json-patch => github.com/evanphx/json-patch v0.0.0-20190815234213-e83c0a1c26c8
	github.com/imdario/mergo => github.com/imdario/mergo v0.3.5
	github.com/spf13/viper => github.com/istio/viper v1.3.3-0.20190515210538-2789fed3109c
	vbom.ml/util => github.com/fvbommel/util v0.0.0-20160121211510-db5cfe13f5cc
)

require (
	github.com/gogo/protobuf v1.3.1
	google.golang.org/grpc v1.33.1
	istio.io/api v0.0.0-20201112235759-fa4ee46c5dc2
	istio.io/istio v0.0.0-20201118224433-c87a4c874df2
	istio.io/pkg v0.0.0-20201112235759-c861803834b2
)
