package server

import (
	"context"

	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/kubernetes"
)

// Inspect looks for what keeps the objects of a consumer from being written and
// from taking effect, see [kubernetes.Inspect].
func (s *Server) Inspect(ctx context.Context, k *config.Kubernetes, look string) ([]kubernetes.Finding, error) {
	stubs, _, err := s.Stubs(k)
	if err != nil {
		return nil, err
	}
	return kubernetes.Inspect(ctx, kubernetes.Options{
		Stub: stubOf(k), Kubeconfig: k.Kubeconfig, Namespaces: k.View.Namespaces, LeaseNamespace: k.LeaseNamespace,
	}, look, stubs), nil
}
