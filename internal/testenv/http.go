//go:build unix

package testenv

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// ParseMetrics returns the families of a metrics page.
func ParseMetrics(t testing.TB, name string, text []byte) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(string(text)))
	if err != nil {
		t.Fatalf("%s: parse its metrics: %v", name, err)
	}
	return families
}

// HttpGet returns the body and the status code of a page.
func HttpGet(t testing.TB, client *http.Client, url string) (body []byte, code int, err error) {
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		return nil, 0, err
	}
	res, err := client.Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer res.Body.Close()
	body, err = io.ReadAll(res.Body)
	return body, res.StatusCode, err
}

// AdminTime bounds one request of a test to the HTTP API. Some requests, such
// as the creation of a user, hash a password, which is slow on a busy machine.
const AdminTime = time.Minute

// CallTime bounds one call of a client to a backend.
const CallTime = 5 * time.Second
