package server

import (
	"context"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-mesh/isthmus/server/config"
	"github.com/isthmus-mesh/isthmus/server/kubernetes"
)

// Inspect looks for what keeps the objects of a consumer from being written and
// from taking effect, see [kubernetes.Inspect].
func (s *Server) Inspect(ctx context.Context, k *config.Kubernetes, look string) ([]kubernetes.Finding, error) {
	planned, _ := s.Plan(k)
	var want []*unstructured.Unstructured
	for _, p := range planned {
		want = append(want, p.Objects...)
	}
	return kubernetes.Inspect(ctx, kubernetes.Options{
		Make: makerOf(k), Kubeconfig: k.Kubeconfig, Namespaces: k.View.Namespaces, LeaseNamespace: k.LeaseNamespace,
	}, look, want), nil
}
