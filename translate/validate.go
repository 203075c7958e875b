package translate

import (
	"errors"

	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"
)

// ValidateBody returns what istiod would reject in the body of a resource.
// istiod rejects silently, so validate before serving. All errors are joined. A
// ServiceEntry may lack endpoints. Kinds other than ServiceEntry and
// WorkloadEntry are not checked.
func ValidateBody(body proto.Message) error {
	switch body := body.(type) {
	case *networking.ServiceEntry:
		return errors.Join(checkServiceEntry(body)...)
	case *networking.WorkloadEntry:
		return errors.Join(checkWorkloadEntry(body)...)
	}
	return nil
}
