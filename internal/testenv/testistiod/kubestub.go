package testistiod

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// startKubeStub starts a fake, empty Kubernetes API server, and returns a
// kubeconfig for it. Istiod 1.30 and later do not start without one.
func startKubeStub(t testing.TB) (kubeconfig string) {
	t.Helper()
	closing := make(chan struct{})
	srv := httptest.NewServer(kubeHandler(closing))
	t.Cleanup(func() {
		close(closing) // ends the watches, for which Close waits
		srv.Close()
	})
	return fmt.Sprintf(`apiVersion: v1
kind: Config
current-context: stub
clusters: [{name: stub, cluster: {server: %q}}]
contexts: [{name: stub, context: {cluster: stub, user: stub}}]
users: [{name: stub, user: {}}]
`, srv.URL)
}

// kubeHandler answers as an empty cluster does: no API groups, empty lists,
// watches without events (until closing is closed), no objects, no permission
// to write.
func kubeHandler(closing <-chan struct{}) http.Handler {
	mux := http.NewServeMux()
	reply := func(w http.ResponseWriter, code int, body string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_, _ = io.WriteString(w, body)
	}
	status := func(w http.ResponseWriter, code int, reason, message string) {
		reply(w, code, fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","reason":%q,"message":%q,"code":%d}`,
			reason, message, code))
	}
	for path, body := range map[string]string{
		"/version": `{"major":"1","minor":"34","gitVersion":"v1.34.0","platform":"linux/amd64"}`,
		"/api":     `{"kind":"APIVersions","versions":[]}`,
		"/apis":    `{"kind":"APIGroupList","apiVersion":"v1","groups":[]}`,
	} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, body) })
	}
	resource := func(w http.ResponseWriter, r *http.Request) {
		query := r.URL.Query()
		watch := query.Get("watch") == "true" || query.Get("watch") == "1"
		switch {
		case r.Method != http.MethodGet:
			status(w, http.StatusForbidden, "Forbidden", "this cluster is a stub and keeps nothing")
		case watch && query.Get("sendInitialEvents") == "true":
			// client-go then falls back to list and watch; after 200 it would
			// wait for a bookmark.
			status(w, http.StatusUnprocessableEntity, "Invalid", "sendInitialEvents is not supported")
		case watch:
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusOK)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-r.Context().Done():
			case <-closing:
			}
		case namesOne(r.PathValue("rest")):
			status(w, http.StatusNotFound, "NotFound", "this cluster is empty")
		case strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList"):
			reply(w, http.StatusOK, `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"1"},"items":[]}`)
		default:
			// Without kind, so that the client decodes it as the requested
			// list.
			reply(w, http.StatusOK, `{"metadata":{"resourceVersion":"1"},"items":[]}`)
		}
	}
	mux.HandleFunc("/api/v1/{rest...}", resource)
	mux.HandleFunc("/apis/{group}/{version}/{rest...}", resource)
	return mux
}

// namesOne reports whether a path is that of one object and not of a list.
// Below the group and version it is RESOURCE, RESOURCE/NAME,
// namespaces/NS/RESOURCE or namespaces/NS/RESOURCE/NAME.
func namesOne(path string) bool {
	return strings.Count(strings.Trim(path, "/"), "/")%2 == 1
}
