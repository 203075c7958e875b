package translate

import (
	"errors"

	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"
)

// ValidateBody says what istiod would reject in the body of a resource: istiod itself tells nobody, so it has to be known before
// serving. The error joins one for each thing that is wrong. A ServiceEntry may lack its endpoints. Of kinds besides
// ServiceEntry and WorkloadEntry nothing is checked.
func ValidateBody(body proto.Message) error {
	switch body := body.(type) {
	case *networking.ServiceEntry:
		return errors.Join(checkServiceEntry(body)...)
	case *networking.WorkloadEntry:
		return errors.Join(checkWorkloadEntry(body)...)
	}
	return nil
}
