package testenv

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// plain keeps no connection: a server that ends leaves none.
var plain = &http.Client{Timeout: AdminTime, Transport: &http.Transport{DisableKeepAlives: true}}

// Do makes a request with a client, nil for one that keeps no connection, and
// returns the body and the status of the answer. A body is sent as it is if it
// is text or bytes, and as JSON otherwise.
func Do(ctx context.Context, client *http.Client, method, url string, header map[string]string, body any) (answer []byte, code int, err error) {
	var content []byte
	switch body := body.(type) {
	case nil:
	case string:
		content = []byte(body)
	case []byte:
		content = body
	default:
		if content, err = json.Marshal(body); err != nil {
			return nil, 0, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(content))
	if err != nil {
		return nil, 0, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for name, value := range header {
		req.Header.Set(name, value)
	}
	res, err := cmp.Or(client, plain).Do(req)
	if err != nil {
		return nil, 0, err
	}
	defer res.Body.Close()
	answer, err = io.ReadAll(res.Body)
	return answer, res.StatusCode, err
}

// Try is Do without a client, and returns an error unless the answer is one of
// success.
func Try(ctx context.Context, method, url string, header map[string]string, body any) (string, error) {
	answer, code, err := Do(ctx, nil, method, url, header, body)
	if err == nil && code/100 != 2 {
		err = fmt.Errorf("%s %s: status %d: %.500s", method, url, code, answer)
	}
	return string(answer), err
}

// Get returns the body and the status of a page.
func Get(t testing.TB, url string) (body []byte, code int, err error) {
	return Do(t.Context(), nil, http.MethodGet, url, nil, nil)
}

// Answers reports whether a page has the status 200. It is a check for
// [Process.StartReady].
func Answers(url string) (seen string, ok bool) {
	ctx, cancel := context.WithTimeout(context.Background(), CallTime)
	defer cancel()
	body, code, err := Do(ctx, nil, http.MethodGet, url, nil, nil)
	return fmt.Sprintf("%s: status %d %.500s, error %v", url, code, body, err), code == http.StatusOK
}

// Page returns the body of a page. The test ends if its status is not 200.
func Page(t testing.TB, url string) []byte {
	t.Helper()
	body, code, err := Get(t, url)
	if err != nil || code != http.StatusOK {
		t.Fatalf("get %s: status %d, error %v: %.500s", url, code, err, body)
	}
	return body
}

// JSON decodes a page.
func JSON(t testing.TB, url string, into any) {
	t.Helper()
	body := Page(t, url)
	if err := json.Unmarshal(body, into); err != nil {
		t.Fatalf("parse %s: %v\n%.2000s", url, err, body)
	}
}

// Metrics returns the families of a metrics page by name.
func Metrics(t testing.TB, url string) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(Page(t, url)))
	if err != nil {
		t.Fatalf("parse %s: %v", url, err)
	}
	return families
}

// ByLabel returns the values of a metric, summed by those of a label.
func ByLabel(family *dto.MetricFamily, label string) map[string]int {
	sums := map[string]int{}
	for _, m := range family.GetMetric() {
		for _, l := range m.GetLabel() {
			if l.GetName() == label {
				sums[l.GetValue()] += int(m.GetCounter().GetValue() + m.GetGauge().GetValue() + m.GetUntyped().GetValue())
			}
		}
	}
	return sums
}
